"""Command lines: argv to a resolved configuration to a run. Only this package and tools use argparse."""
