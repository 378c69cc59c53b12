"""`steerpipe demo`: what the engine does, measured while you watch."""

from steerpipe.demo.show import DemoReport, run_demo

__all__ = ["DemoReport", "run_demo"]
