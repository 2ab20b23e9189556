"""What front ends do alike, whatever framework they stand behind; no framework is imported here."""
