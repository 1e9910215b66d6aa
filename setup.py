"""Hands the build to pyproject.toml; kept for tools that still call it."""

from setuptools import setup

setup()
