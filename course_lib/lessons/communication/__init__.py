"""Lesson 18: training that communicates less."""
