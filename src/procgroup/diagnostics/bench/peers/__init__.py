"""The peers' rank processes: each module is run as a program, in the environment of its peer."""
