"""Measures a trained model, and fails the run if its gate does not hold."""
