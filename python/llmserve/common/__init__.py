"""What several folders use: checks of arguments, units, tables for notebooks."""
