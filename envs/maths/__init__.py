"""Package of maths environments: word problems, calculations, data sets and a Python tool."""
