"""The question: one frozen ``Run``, its parts, and the declaration of every setting."""
