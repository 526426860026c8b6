"""Lesson 07: pipeline schedules, predicted and measured."""
