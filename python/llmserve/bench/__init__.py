"""Benchmarks of a whole engine, each beside a bound that the same run measured."""
