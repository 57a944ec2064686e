"""Tools that start runs, read their results and compare them. rl/ never imports lab/."""
