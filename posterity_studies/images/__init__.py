"""Images by MAP and by mean-field inference, its KL weight chosen on held-out images; resumes when interrupted.

Example: posterity study images --networks mlp --seeds 1 --steps 2000
"""
