"""Images by MAP and by mean-field inference, its KL weight chosen on held-out images; goes on where it stopped.

Example: posterity study images --networks mlp --seeds 1 --steps 2000
"""
