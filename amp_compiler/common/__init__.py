"""What every package may use: errors, messages, files, logs, and what differs between releases of torch."""
