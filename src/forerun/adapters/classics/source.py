"""The source of ``mlpredict:FILE``, apart from the package: its commands load no framework for their help."""

from forerun.tracing.source import Source, later

MLPREDICT = Source(build=later(f"{__package__}.mlpredict_files", "build_mlpredict"), reads_file=True)
