"""How near is each method's predictive to the exact posterior's? Small nets against NUTS, CIFAR-10 against HMC.

Example: posterity study fidelity --problem moons,boston --methods laplace,ensemble,mclmc

Example: posterity study fidelity --problem cifar-10 --methods map,sghmc --device cuda --minutes 9
"""
