"""Methods on images: error, calibration, foreign inputs, and what rotation, noise, blur, contrast and occlusion do.

Example: posterity study shift --networks lenet --methods map,ensemble,laplace --epochs 0.2 --out study-shift

Example: posterity study shift --data cifar-10 --augment --device cuda
"""
