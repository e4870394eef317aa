output "group" {
  description = "The managed instance group."
  value       = google_compute_region_instance_group_manager.nodes.id
}

output "service_account" {
  description = "Who the nodes are."
  value       = google_service_account.node.email
}

output "node_env" {
  description = "The environment file of the nodes' daemons as it is rendered; without secrets."
  value       = local.node_env
}
