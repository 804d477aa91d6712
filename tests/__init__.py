"""Tests of ringkv, model and scripts. A package, so that test files can import each other's tools by name."""
