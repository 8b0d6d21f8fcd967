"""Models by name or from a config, the pretrained model, precisions and training text."""
