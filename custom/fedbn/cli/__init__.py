"""The console command's groups: they read arguments and call; no logic."""
