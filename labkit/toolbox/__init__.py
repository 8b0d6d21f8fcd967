"""What single lessons need: losses over seeds, disks, DeepSpeed, spans of time."""
