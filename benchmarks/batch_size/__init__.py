"""What a batch size that follows the noise scale gains."""
