"""What is asked about: one frozen ``Run``, its parts, and the declaration of every setting."""
