"""Questions with an answer that can be computed: word problems, data sets, a Python tool."""
