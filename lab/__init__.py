"""Tools that start runs, read them and help to judge them. rl/ never imports lab/."""
