"""Pages and charts of forecasts and schedules."""
