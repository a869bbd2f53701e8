"""From generations to files that other tools read, and back."""
