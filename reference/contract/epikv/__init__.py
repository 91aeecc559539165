"""What both sides of EpiKV share: its config, and checks of arguments."""
