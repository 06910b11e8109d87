"""What a training script of a user spends its time on: it is run unchanged, watched from inside and outside."""
