"""What goes where: devices and cores for each process of a run, and the memory it will take."""
