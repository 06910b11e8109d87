"""When a run gets where: curves, forecasters of them, intervals, batch-size laws. Numbers only, no framework."""
