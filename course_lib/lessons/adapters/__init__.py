"""Lesson 19: adapters beside frozen, quantized weights."""
