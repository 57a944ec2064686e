"""Maths environments: word problems, calculations, data sets and a Python tool."""
