"""What several test files share, by subject; imported as `helpers.<subject>`."""
