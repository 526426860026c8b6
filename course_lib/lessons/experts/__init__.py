"""Lesson 15: mixtures of experts, on one rank and spread over several."""
