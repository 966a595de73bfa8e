"""The service on a robot: installed, upgraded, rolled back and removed, with no network."""
