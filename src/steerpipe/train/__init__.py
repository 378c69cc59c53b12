"""Predictors learn here: from a trace, or from a model and prompts that are traced on the fly."""
