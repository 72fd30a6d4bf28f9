"""What several methods share: chains, gradients of bounds, Gaussians at modes."""
