"""The command ``forerun``: parses, calls ``forerun.api``, renders. Imports of a command happen inside it."""
