"""Choice among predictions: candidates, limits, the Pareto front, and the reasons for rejections."""
