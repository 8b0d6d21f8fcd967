"""Recipes: estimate what one takes, search for what fits, advise, and write the training script."""
