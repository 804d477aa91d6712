"""Tests of ringkv, model and scripts. A package, so that test files can import each other's tools by name."""

import pytest

pytest.register_assert_rewrite("tests.ring_tools", "tests.ring_machine", "tests.strategies")
