output "group_name" {
  description = "Name of the Auto Scaling group: what the controller's node provider is told."
  value       = aws_autoscaling_group.nodes.name
}

output "controller_settings" {
  description = "What the controllers are told of this pool (settings of modules/gateway)."
  value = {
    SLLM_NODE_PROVIDER = "aws"
    SLLM_NODES_GROUP   = aws_autoscaling_group.nodes.name
    SLLM_NODES_REGION  = var.region
    SLLM_NODES_CPU     = tostring(local.shape.cpu)
    SLLM_NODES_MEMORY  = local.shape.memory
    SLLM_NODES_GPUS    = local.shape.gpus
    SLLM_NODES_LABELS  = local.labels
    SLLM_NODES_BOOT    = tostring(min(180, floor(var.boot_timeout_s / 2))) # less than what it is given up after
    SLLM_NODES_LOST    = tostring(var.boot_timeout_s)
    SLLM_NODES_SANDBOX = lookup(var.settings, "SLLM_SANDBOX", "process")
  }
}

output "scaler_policy_arn" {
  description = "Policy that lets the controller size this group and nothing else; attach it to the controller's role."
  value       = aws_iam_policy.scaler.arn
}

output "node_role_name" {
  description = "Role of the nodes."
  value       = aws_iam_role.node.name
}

output "launch_template_id" {
  description = "Launch template of the nodes."
  value       = aws_launch_template.node.id
}

output "node_env" {
  description = "The environment file of the nodes' daemons as it is rendered; without secrets."
  value       = local.node_env
}

output "boot_env" {
  description = "What the boot script reads, as it is rendered; without secrets."
  value       = local.boot_env
}
