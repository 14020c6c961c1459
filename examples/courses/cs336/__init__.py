"""Adapters for the assignments of CS336: docs/guides/courses.md says how to run their tests."""
