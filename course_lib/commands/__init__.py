"""The commands of `course`, one module each: NAME, HELP, register(parser) and run(args) -> exit code."""
