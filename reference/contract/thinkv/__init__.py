"""What both sides of ThinKV share: its config, types, and checks of arguments."""
