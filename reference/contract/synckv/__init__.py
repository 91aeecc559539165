"""What both sides of SyncKV share: its config, types, and checks of arguments."""
