"""Find a committed generation, read and verify its bytes, build or fill a state."""
