"""Lesson 05: the bytes that each ZeRO stage holds and sends."""
