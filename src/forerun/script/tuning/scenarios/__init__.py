"""The built-in task of system D: SqueezeNet 1.1 on a folder of images, trained as scenarios."""
