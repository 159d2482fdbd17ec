"""De-identification and detection of burned-in text."""
