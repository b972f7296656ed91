"""What backups cost: time, memory, size."""
